"""Deployments: who aggregates and serves where, and the jobs that are opened there."""
