"""What must be measured: each module is one command that prints a table and JSON, and asserts no time."""
