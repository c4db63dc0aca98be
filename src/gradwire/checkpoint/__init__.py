"""One checkpoint for all plans: written by any plan at any world size, read by any other, equal to the byte.

The format, version 1. ``DIR/checkpoint-<n>`` is a folder that never changes; n grows by one with each save into DIR. It holds

- ``rank-<r>.safetensors``, one for each rank that wrote something. The keys are the tensors' names in the manifest,
  ``section/name``: ``model/0.weight``, ``optimizer.0/0.weight.exp_avg``, ``rng/1/torch``. complex128, which safetensors lacks,
  is stored as pairs of float64.
- ``manifest.json``: the format and the versions of gradwire and torch; world size, mesh, plan; ``files`` (bytes, the header's
  CRC-32); ``tensors`` (dtype, global shape, and the pieces: file, offset and length in each dimension, CRC-32; where the ranks'
  copies of a piece differed, as under ``local``, each one, with the ranks that held it); ``aliases`` (names that share a
  tensor); ``sections`` (all that is not a tensor, as JSON; ``{"$tensor": name}`` stands for one). Its first line is the CRC-32
  of what follows.

``DIR/latest`` holds the name of the newest one, for people and other tools; ``load`` looks at the folders themselves. A
checkpoint is written into ``DIR/.checkpoint-<n>.partial``, files and folder are synced, all ranks agree that they are done, and
then the folder gets its name: a folder with that name is complete. Nothing is pickled.
"""
