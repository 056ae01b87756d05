"""What ./dev needs of the system, and how the distribution's package manager installs it.

Like ./dev, this needs the standard library only, and has no syntax newer than Python 3.6.
"""

import importlib
import importlib.util
import os
import shutil
import subprocess


def install(say, tools=None, without="emulated hosts, or losses on their links,"):
    """Have the distribution's package manager install what the system lacks; without the right to, say the command.

    Args:
        say: tells the user a line.
        tools: of which; by default `SYSTEM_TOOLS`.
        without: what is left out where those are missing that Penstock can do without.

    Returns: what Penstock cannot do without and is still missing, with the command that installs it; None if nothing is.
    """
    tools = SYSTEM_TOOLS if tools is None else tools
    missing = [tool for tool in tools if not tool["there"]()]
    if not missing:
        return None
    name = next(filter(shutil.which, PACKAGE_MANAGERS), "apt-get")
    manager, install = shutil.which(name), PACKAGE_MANAGERS[name]
    column = "debian" if name == "apt-get" else "others"
    packages = [package for tool in missing for package in tool[column].split()]
    if manager is not None and os.geteuid() == 0:
        say(f"installing what the system lacks: {' '.join([name, *install, *packages])}")
        env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "env": env}
        if name == "apt-get":
            # Briefly: a machine without a network shall not wait minutes for it.
            brief = ["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20"]
            subprocess.run([manager, "-q", *brief, "update"], **quiet)
        if subprocess.run([manager, *install, *packages], **quiet).returncode != 0:
            # One that the distribution lacks shall not keep the others out.
            for package in packages:
                subprocess.run([manager, *install, package], **quiet)
        importlib.invalidate_caches()
        missing = [tool for tool in missing if not tool["there"]()]
    needed = ", ".join(tool["what"] for tool in missing if tool["needed"])
    useful = ", ".join(tool["what"] for tool in missing if not tool["needed"])
    # A fresh Debian knows no package before its first update.
    update = "apt-get update && " if name == "apt-get" else ""
    by_hand = update + " ".join([name, *install, *(tool[column] for tool in missing)])
    if needed:
        also = f", and {useful}, which emulated hosts need" if useful else ""
        return f"the system lacks {needed}{also}. As root: {by_hand}"
    if useful:
        say(f"the system lacks {useful}: {without} are left out. As root: {by_hand}")
    return None


def on_path(command):
    return lambda: shutil.which(command, path=os.pathsep.join([os.environ["PATH"], *SYSTEM_PLACES])) is not None


def can_make_venv():
    """Debian and Ubuntu split `ensurepip` off; where pip is there, it serves (`create_venv` in dev)."""
    return importlib.util.find_spec("venv") is not None and any(map(importlib.util.find_spec, ("ensurepip", "pip")))


# Where system tools are, and where an ordinary user's PATH does not lead.
SYSTEM_PLACES = ["/usr/sbin", "/sbin"]
# What the system must bring, with the packages that hold it: Debian's names, and those that others share.
SYSTEM_TOOLS = (
    {"what": "a C compiler (cc)", "there": on_path("cc"), "needed": True, "debian": "gcc libc6-dev", "others": "gcc"},
    {
        "what": "Python's venv",
        "there": can_make_venv,
        "needed": True,
        "debian": "python3-venv",
        "others": "python3-pip",
    },
    {
        "what": "ip and tc",
        "there": on_path("tc"),
        "needed": False,
        "debian": "iproute2",
        "others": "iproute iproute-tc",
    },
    {"what": "nft", "there": on_path("nft"), "needed": False, "debian": "nftables", "others": "nftables"},
    {"what": "ethtool", "there": on_path("ethtool"), "needed": False, "debian": "ethtool", "others": "ethtool"},
)
# What tests need besides; a browser under any of these names draws the reports (tests/browser.py).
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
TEST_TOOLS = (
    {
        "what": "a browser (chromium)",
        "there": lambda: any(on_path(name)() for name in BROWSERS),
        "needed": False,
        "debian": "chromium",
        "others": "chromium",
    },
)
PACKAGE_MANAGERS = {
    "apt-get": ["install", "-q", "-y", "--no-install-recommends"],
    "dnf": ["install", "-q", "-y"],
    "yum": ["install", "-q", "-y"],
}
