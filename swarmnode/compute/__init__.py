"""What runs inside a stage worker process; the only package that may import torch."""
