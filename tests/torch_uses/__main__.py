"""Print every program: its ranks, the torch that it needs, backends that cannot run it, and what it shows."""

from torch_uses import all_uses

for use in all_uses():
    torch_needed = "torch >= {}.{}".format(*use.since)
    print(f"{use.name:45} {use.ranks} ranks  {torch_needed}  {use.purpose}")
    for backend, reason in use.without.items():
        print(f"{'':45} not with {backend}: {reason}")
