"""The async services a node runs: coordinator and peer."""
