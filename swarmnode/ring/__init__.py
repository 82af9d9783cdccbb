"""The rules of a ring of stages: sessions, scheduling, budgets. No I/O, no torch, no clock."""
