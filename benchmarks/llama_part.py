"""llama.cpp in a process of its own, for the benchmarks that compare with it: a model that is driven by lines on stdin,
or the other end of its RPC.

Needs an interpreter with llama-cpp-python and nothing of swarmnode. A model's process prints one JSON object a line:
`{"layers": …}` when it is ready, then an answer to each line it reads: `{"read": TEXT}` starts a new conversation and
gives the seconds until its first token, `{"go_on": N}` gives the seconds of N more greedy tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

CPU_DEVICE = 0
"""GGML_BACKEND_DEVICE_TYPE_CPU."""
CONTEXT_TOKENS = 2048
SERVE, MODEL = "serve", "model"


def load_ggml() -> Callable[..., Any]:
    """A function that finds ggml's functions, all of which give pointers here, in the libraries of the package."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    libraries = [ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in sorted(folder.glob("libggml*.so"))]

    def find(name: str) -> Any:
        function = next(getattr(library, name) for library in libraries if hasattr(library, name))
        function.restype = ctypes.c_void_p
        return function

    find("ggml_backend_load_all")()
    return find


def serve(endpoint: str, threads: int) -> None:
    """Compute for whoever connects, on this machine's CPU; does not return."""
    ggml = load_ggml()
    devices = (ctypes.c_void_p * 1)(ggml("ggml_backend_dev_by_type")(CPU_DEVICE))
    start, n_devices = ggml("ggml_backend_rpc_start_server"), ctypes.c_size_t(1)
    start(endpoint.encode(), None, ctypes.c_size_t(threads), n_devices, devices)


def use_server(endpoint: str) -> None:
    """Let the models loaded from now on put their last layers on the server at `endpoint`."""
    from llama_cpp import llama_cpp

    ggml = load_ggml()
    registry = ctypes.c_void_p(ggml("ggml_backend_rpc_add_server")(endpoint.encode()))
    ggml("ggml_backend_register")(registry)
    devices = (ctypes.c_void_p * 2)(ggml("ggml_backend_reg_dev_get")(registry, ctypes.c_size_t(0)), None)
    defaults = llama_cpp.llama_model_default_params

    def with_devices() -> Any:
        params = defaults()
        params.devices = ctypes.cast(devices, ctypes.c_void_p)
        return params

    llama_cpp.llama_model_default_params = with_devices


class Model:
    """One conversation at a time, always the likeliest token."""

    def __init__(self, path: str, threads: int, remote_layers: int) -> None:
        from llama_cpp import Llama

        counts = {"n_ctx": CONTEXT_TOKENS, "n_threads": threads, "n_threads_batch": threads}
        self._llama = Llama(path, n_gpu_layers=remote_layers, verbose=False, **counts)
        self._next = 0

    @property
    def layers(self) -> int:
        return int(self._llama.metadata[f"{self._llama.metadata['general.architecture']}.block_count"])

    def read(self, text: str) -> dict[str, Any]:
        tokens = self._llama.tokenize(text.encode())
        self._llama.reset()
        return {"prompt_tokens": len(tokens), "seconds": self._feed(tokens)}

    def go_on(self, count: int) -> dict[str, Any]:
        return {"seconds": [self._feed([self._next]) for _ in range(count)]}

    def _feed(self, tokens: list[int]) -> float:
        began_s = time.perf_counter()
        self._llama.eval(tokens)
        self._next = self._llama.sample(temp=0.0)
        return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description="llama.cpp, for benchmarks that compare with it.")
    parser.add_argument("part", choices=(SERVE, MODEL))
    parser.add_argument("what", help="HOST:PORT to serve on, or a GGUF file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--server", help="HOST:PORT of the process that computes the last layers")
    parser.add_argument("--remote-layers", type=int, default=0, help="how many that is; the head counts as one")
    chosen = parser.parse_args()
    if chosen.part == SERVE:
        serve(chosen.what, chosen.threads)
        return
    if chosen.server:
        use_server(chosen.server)
    model = Model(chosen.what, chosen.threads, chosen.remote_layers)
    print(json.dumps({"layers": model.layers}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(model.read(asked["read"]) if "read" in asked else model.go_on(asked["go_on"])), flush=True)


if __name__ == "__main__":
    main()
