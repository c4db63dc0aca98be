"""Starting processes, and hearing from them. The standard library only: no torch below this package."""
