"""swarmnode: one language model across several home PCs, behind one OpenAI endpoint."""

__version__ = "0.1.0"
