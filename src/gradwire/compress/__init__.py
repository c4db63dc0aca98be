"""Reducers: how a bucket is agreed exactly, or in fewer bytes."""
