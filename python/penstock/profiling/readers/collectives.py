"""What a trace says about a collective: its name, its group, its size, and what it is for. Kineto's names; pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from penstock.profiling import purposes
from penstock.profiling.matching import canonical

__all__ = ["Described", "Group", "described", "from_kernel", "groups", "is_kernel", "kept", "purpose"]


@dataclass(frozen=True)
class Group:
    """A process group, as `distributedInfo` lists it."""

    name: str
    about: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Described:
    """A collective as far as an event tells."""

    name: str
    group: str
    bytes: int
    ranks: int
    peer: int | None
    about: str
    """Of its group."""


def groups(info: Any) -> dict[str, Group]:
    """By name."""
    listed = info.get("pg_config") if isinstance(info, dict) else None
    found = {}
    for each in listed[:MOST_GROUPS] if isinstance(listed, list) else []:
        if isinstance(each, dict) and isinstance(each.get("pg_name"), str):
            name = each["pg_name"][:256]
            found[name] = Group(name, str(each.get("pg_desc", ""))[:256], _ranks(each.get("ranks")))
    return found


def kept(args: Mapping[str, Any]) -> dict[str, Any]:
    """What of an event's arguments counts, in little room: a trace has millions of events. The names are those of torch's
    ParamCommsUtils.hpp; operators have shapes instead, and the peer among their inputs."""
    found: dict[str, Any] = {}
    for key in TEXTS:
        text = args.get(key)
        if isinstance(text, list) and key == "Process Group Ranks":
            text = str(text[:MOST_GROUPS])
        if isinstance(text, str) and len(text) <= MOST_TEXT:
            found[key] = sys.intern(text)
    found |= {key: args[key] for key in COUNTS if _is_count(args.get(key))}
    if "In msg nelems" not in found and (size := _size(args.get("Input Dims"), args.get("Input type"))):
        found["bytes"] = size
    inputs = args.get("Concrete Inputs")  # of c10d::send and recv_: tensors, group, rank, tag
    said = inputs[2] if isinstance(inputs, list) and len(inputs) > 2 else None
    if isinstance(said, str) and re.fullmatch(r"[0-9]{1,7}", said):
        found["peer"] = int(said)
    return found


def described(name: str, args: Mapping[str, Any], known: Mapping[str, Group]) -> Described:
    """``name`` is the event's, such as ``gloo:all_reduce``; arguments say more where there are any."""
    said = args.get("Collective name")
    kind = canonical(said if isinstance(said, str) and said else name.rpartition(":")[2])
    group = args.get("Process Group Name")
    if not isinstance(group, str):
        group = next(iter(known)) if len(known) == 1 else ""
    group = group[:256]
    about = args.get("Process Group Description")
    listed = known.get(group)
    ranks = _ranks(args.get("Process Group Ranks")) or (listed.ranks if listed else ())
    size = args.get("Group size")
    peer = _peer(kind, args, ranks)
    return Described(
        kind,
        group,
        _bytes(args),
        len(ranks) or (size if _is_count(size) else 0),
        peer,
        about[:256] if isinstance(about, str) else listed.about if listed else "",
    )


def is_kernel(name: str) -> bool:
    """Whether a kernel of a GPU communicates (NCCL's and RCCL's)."""
    return name.startswith(("nccl", "rccl", "mscclKernel"))


def from_kernel(name: str) -> str:
    """``all_reduce`` of ``ncclDevKernel_AllReduce_Sum_f32_RING_LL``."""
    return canonical(name.partition("_")[2].partition("(")[0])


def purpose(what: Described, rank: int | None, phase: str) -> str:
    """One of `breakdown.PURPOSES`, or nothing if neither the group's description nor the phase tells."""
    kind, peer = what.name, what.peer
    if named := purposes.of_group(what.about):
        return named
    if kind == "send":
        return "pipeline send"
    if kind == "recv":
        if peer is not None and rank is not None:
            return "pipeline forward recv" if peer < rank else "pipeline backward recv"
        return "pipeline backward recv" if phase == "backward" else "pipeline forward recv"
    # A kernel that sends and receives, and that nothing explains, is called all_to_all, too: it may be a pipeline's.
    return "" if kind == "all_to_all" else purposes.of_operation(kind, phase, is_within=True)


def _peer(kind: str, args: Mapping[str, Any], ranks: tuple[int, ...]) -> int | None:
    if kind not in ("send", "recv"):
        return None
    peer = args.get("Dst Rank" if kind == "send" else "Src Rank", args.get("peer"))
    return None if peer is None else ranks[peer] if peer < len(ranks) else peer


def _bytes(args: Mapping[str, Any]) -> int:
    if "In msg nelems" not in args:
        return int(args.get("bytes", 0))
    return int(args["In msg nelems"] * WIDTHS.get(str(args.get("dtype")).lower(), 0))


def _size(shapes: Any, kinds: Any) -> int:
    """Of inputs: each is a shape, or a list of shapes."""
    total = 0
    if isinstance(shapes, list) and isinstance(kinds, list):
        for shape, kind in zip(shapes[:1000], kinds, strict=False):
            lists = shape if isinstance(shape, list) and shape and isinstance(shape[0], list) else [shape]
            total += sum(map(_elements, lists[:1000])) * WIDTHS.get(str(kind).lower(), 0)
    return min(total, 1 << 48)


def _elements(shape: Any) -> int:
    if not isinstance(shape, list) or not shape or len(shape) > 64 or not all(map(_is_count, shape)):
        return 0
    product = 1
    for each in shape:
        product = min(product * each, 1 << 48)
    return product


def _ranks(value: Any) -> tuple[int, ...]:
    """Of a list, or of its text (``[0, 1, 2]``, which ends in dots if it is long)."""
    if isinstance(value, str):
        if "..." in value:
            return ()
        value = [int(each) for each in re.findall(r"[0-9]{1,7}", value)]
    if not isinstance(value, list) or not all(map(_is_count, value)):
        return ()
    return tuple(value)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


TEXTS = ("Collective name", "dtype", "Process Group Name", "Process Group Description", "Process Group Ranks")
COUNTS = ("In msg nelems", "Group size", "Src Rank", "Dst Rank")
MOST_TEXT = 1 << 16

WIDTHS = {
    "float": 4,
    "double": 8,
    "half": 2,
    "bfloat16": 2,
    "c10::half": 2,
    "c10::bfloat16": 2,
    "byte": 1,
    "char": 1,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
    "short": 2,
    "int": 4,
    "long": 8,
    "long int": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "c10::float8_e4m3fn": 1,
    "c10::float8_e5m2": 1,
    "complexfloat": 8,
    "complexdouble": 16,
}
"""Bytes of an element, by the names of ScalarType and of C++'s types; others count as 0."""

MOST_GROUPS = 100_000
