"""What runs in the processes of a profiled command (docs/design/profile.md, "How it gets into the script").

- `site/sitecustomize.py`: waits for torch; `install`: the marks.
- `recording`: a rank. `journal` (marks as they come), `marks` (spans, steps) and `iterations` (where a step ends) know no torch.
- `collectives`: calls of torch.distributed. `sampling`, `kineto`, `settling`: torch's profiler, and when it may stop.
- `changes`: what --apply changes.
- `identity`, `writer`, `counters`: who this is, its file, and the process that reads the host's counters.
"""
