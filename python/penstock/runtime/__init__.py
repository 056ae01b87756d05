"""What every front stands on: settings, the process's engine, and groups that ranks join through a store. No torch."""
