"""Frames, HTTP/2 sessions and links between nodes."""
