"""One model over several ranks: cut into stages, sharded by rows, its layers shared."""
