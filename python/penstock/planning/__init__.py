"""Who sums whose gradients: finds how a job is split among servers and aggregators (`search`), how far that is from a bound
(`relax`), and what a scheme is worth (`evaluate`). docs/design/planner.md has the formulas."""
