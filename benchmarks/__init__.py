"""Benchmarks of gradwire beside PyTorch's DDP, and the lab they run in."""
