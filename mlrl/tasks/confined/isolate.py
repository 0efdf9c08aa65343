"""Cutting a process off from the machine: namespaces, a file system of its own, an unprivileged user, limits.

Linux system calls through ctypes, since Python has no wrappers for them before 3.12.
"""

import contextlib
import ctypes
import os
import random
import resource
import signal
import struct
import sys
import time

_libc = ctypes.CDLL(None, use_errno=True)

NEWNS, NEWIPC, NEWUTS, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x4000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38

SYSTEM_PATHS = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/nix/store")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
WORK = "/tmp"


def enter(paths, tmpfs_mb):
    """Moves on in a new process cut off from the machine; returns there what protection could not be had, in words.

    The calling process stays behind, waits for the new one and ends with it. The new one is process 1 of a process
    namespace: when it ends, everything it started is killed.
    """
    missing, folder = [], os.getcwd()
    as_root = os.geteuid() == 0
    user = random.SystemRandom().randrange(0x70000000, 0x7FFF0000) if as_root else os.getuid()
    _die_with_parent()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # should memory run out, the program goes first
    spaces = NEWNS | NEWIPC | NEWUTS | NEWPID | NEWNET
    inside = as_root and _try(_libc.unshare, spaces)
    if not inside:
        outer_ids = os.getuid(), os.getgid()
        if as_root and _become(user):
            outer_ids = user, user
        elif as_root:
            missing.append("user")
        inside = _try(_libc.unshare, NEWUSER | spaces) and _map_ids("/proc", *outer_ids)
        as_root = False
    if not inside:
        missing += ["processes", "network"]
    root = f"{folder}/root" if inside and _prepare_root(paths, tmpfs_mb) else None
    child = os.fork()
    if child:
        os.closerange(0, 3)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _die_with_parent()
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    if root is None or not _change_root(root):
        missing.append("file system")
        os.chdir(folder)
    if as_root:
        if not _become(user):
            missing.append("user")
        if not (_try(_libc.unshare, NEWUSER) and _map_ids(f"/proc/self/fd/{proc}", user, user, proc)):
            missing.append("user namespace")
    os.close(proc)
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process of the same user may look into this one
    return missing


def restrict(limits):
    """Takes privileges from the calling process and bounds what it can use. Nothing of this can be undone.

    Args:
        limits: `cpu_s`, `memory_mb`, `file_mb`, `processes`, `files`.
    """
    for capability in range(64):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    _libc.capset(header, ctypes.create_string_buffer(24))
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _die_with_parent()
    megabyte = 1 << 20
    for name, value in {
        "RLIMIT_CPU": limits["cpu_s"],
        "RLIMIT_AS": limits["memory_mb"] * megabyte,
        "RLIMIT_FSIZE": limits["file_mb"] * megabyte,
        "RLIMIT_NPROC": limits["processes"],
        "RLIMIT_NOFILE": limits["files"],
        "RLIMIT_CORE": 0,
        "RLIMIT_STACK": 64 * megabyte,
        "RLIMIT_MSGQUEUE": 0,
    }.items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def cpu_seconds(pid):
    """Processor seconds that a process has used, all its threads together."""
    return time.clock_gettime((~pid << 3) | 2)


def _try(call, *args):
    return call(*args) == 0


def _die_with_parent():
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _become(user):
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError:  # root of a container that has no other user
        return False
    _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self belongs to root and the id maps cannot be written
    _die_with_parent()  # forgotten when the user changes
    return True


def _map_ids(proc, user, group, proc_fd=None):
    """Maps the user and the group to themselves in the user namespace just made."""
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            path = f"{proc}/self/{name}" if proc_fd is None else f"self/{name}"
            fd = os.open(path, os.O_WRONLY, dir_fd=proc_fd)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # no further namespaces inside, where a program would have privileges again
        fd = os.open(
            f"{proc}/sys/user/max_user_namespaces" if proc_fd is None else "sys/user/max_user_namespaces",
            os.O_WRONLY,
            dir_fd=proc_fd,
        )
        os.write(fd, b"0")
        os.close(fd)
    return True


def _mount(source, target, kind, flags, options=None):
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    return _try(_libc.mount, *encoded, ctypes.c_ulong(flags), options and options.encode())


def _prepare_root(paths, tmpfs_mb):
    """Lays out ``./root``: system libraries and Python to read, an empty /tmp to write, a few devices, nothing else."""
    root = f"{os.getcwd()}/root"
    os.mkdir(root)
    if not _mount(None, "/", None, MS_REC | MS_PRIVATE):
        return False
    if not _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={tmpfs_mb}m,mode=755"):
        return False
    done = []
    for path in sorted({*SYSTEM_PATHS, *DEVICES, *(os.path.abspath(p) for p in paths)}, key=len):
        if not os.path.lexists(path) or any(path.startswith(f"{other}/") for other in done):
            continue
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path) and path.count("/") == 1:
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT, 0o644))
        if not _mount(path, target, None, MS_BIND | MS_REC):
            return False
        if path not in DEVICES:
            kept = os.statvfs(target).f_flag & ~(MS_RDONLY | MS_REMOUNT | MS_BIND) & 0x3FFF
            if not _mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept):
                return False
        done.append(path)
    os.makedirs(root + WORK, exist_ok=True)
    os.chmod(root + WORK, 0o1777)
    return True


def _change_root(root):
    os.chdir(root)
    if not (_try(_libc.pivot_root, b".", b".") and _try(_libc.umount2, b".", MNT_DETACH)):
        return False
    os.chdir(WORK)
    return True


def python_paths():
    """Folders that Python needs to run and import."""
    return sorted({sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, os.path.dirname(os.__file__)})
