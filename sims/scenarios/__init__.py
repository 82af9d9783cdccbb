"""The studies: each module answers one question about a ring with a report."""
