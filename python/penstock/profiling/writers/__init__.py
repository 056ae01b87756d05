"""Files for other tools (docs/reference/profile.md): a trace for Perfetto, traces for HolisticTraceAnalysis, CSV and JSON.

Each writes its file whole or not at all, and raises `penstock.errors.Config` with what to do if it cannot.
"""

from penstock.profiling.writers.tables import csv, from_json, json, steps_csv, usage_csv
from penstock.profiling.writers.trace import kineto, perfetto
from penstock.profiling.writers.whole import whole

__all__ = ["csv", "from_json", "json", "kineto", "perfetto", "steps_csv", "usage_csv", "whole"]
