"""Has a file changed since it was read?"""

from pathlib import Path

Fingerprint = tuple[int, int, int] | None


def fingerprint(file: Path | None) -> Fingerprint:
    """Differs after every change; None while there is no such file."""
    try:
        stat = file.stat() if file else None
    except OSError:
        # gone for now: read again when it is back
        return None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat else None
