"""Counters of GPUs, where there are any: from NVML if `pynvml` is installed, else from one `nvidia-smi` that goes on printing."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from typing import Any

__all__ = ["Gpus"]


class Gpus:
    """Utilisation and memory of NVIDIA's GPUs."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handles: list[Any] = []
        self._tool: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self.absent: list[str] = []
        if not os.path.exists(_DRIVER):
            self.absent.append("GPUs (there is no NVIDIA driver)")
            return
        try:
            self._library = importlib.import_module("pynvml")
            self._library.nvmlInit()
            count = self._library.nvmlDeviceGetCount()
            self._handles = [self._library.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
        except Exception:  # NVML's errors are classes of the module that may be missing
            self._library = None
            self._start_tool()

    def read(self, values: dict[str, float]) -> None:
        """The newest values that there are; those of `nvidia-smi` are up to `_TOOL_S` old."""
        if self._library is not None:
            self._ask_library(values)
        elif self._tool is not None and self._tool.stdout is not None:
            while text := os.read(self._tool.stdout.fileno(), 1 << 16) if self._is_readable() else b"":
                self._rest += text
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                fields = [field.strip() for field in line.split(b",")]
                try:
                    number, busy, used = int(fields[0]), float(fields[1]), float(fields[2])
                except (ValueError, IndexError):  # such as [N/A]
                    continue
                values[f"gpu.{number}.busy_share"] = busy / 100
                values[f"gpu.{number}.memory_bytes"] = used * (1 << 20)

    def close(self) -> None:
        if self._tool is not None:
            self._tool.kill()
            self._tool.wait()
            self._tool = None

    def _ask_library(self, values: dict[str, float]) -> None:
        for number, handle in enumerate(self._handles):
            try:
                values[f"gpu.{number}.busy_share"] = self._library.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                values[f"gpu.{number}.memory_bytes"] = float(self._library.nvmlDeviceGetMemoryInfo(handle).used)
            except Exception:  # one that has fallen off the bus, say
                continue

    def _start_tool(self) -> None:
        path = shutil.which("nvidia-smi")
        if path is None:
            self.absent.append("GPUs (install pynvml, or put nvidia-smi on the path)")
            return
        query = "--query-gpu=index,utilization.gpu,memory.used"
        self._tool = subprocess.Popen(
            [path, query, "--format=csv,noheader,nounits", "-l", str(_TOOL_S)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._tool.stdout is not None
        os.set_blocking(self._tool.stdout.fileno(), False)

    def _is_readable(self) -> bool:
        import select

        assert self._tool is not None and self._tool.stdout is not None
        return bool(select.select([self._tool.stdout], [], [], 0)[0])


_DRIVER = "/proc/driver/nvidia/version"
_TOOL_S = 5
"""Each of its readings costs about 20 ms of a processor (guess)."""
