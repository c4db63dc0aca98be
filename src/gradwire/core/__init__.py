"""Contracts and data that everything else speaks in. No input or output."""
