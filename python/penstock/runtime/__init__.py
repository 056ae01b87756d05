"""The base of every front: settings, the process's engine, and groups that ranks join through a store. Imports no torch."""
