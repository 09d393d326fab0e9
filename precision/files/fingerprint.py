"""A number that tells model files apart without reading them whole."""

import hashlib

from .tensor_file import TensorFile

SAMPLE = 4096


def fingerprint(file: TensorFile) -> str:
    """Return the SHA-256 of each part's header, and of the first 4096 bytes of each tensor's data
    in the order of the headers.

    The header is all that precedes the first tensor.
    Files of one architecture have one header; a finetune changes some of the first bytes of nearly every tensor.
    """
    digest = hashlib.sha256()
    for path in file.files:
        with open(path, "rb") as part:
            entries = [entry for entry in file.entries.values() if entry.file == path]
            digest.update(part.read(min((entry.start for entry in entries), default=-1)))
            for entry in entries:
                part.seek(entry.start)
                digest.update(part.read(min(SAMPLE, entry.end - entry.start)))
    return digest.hexdigest()
