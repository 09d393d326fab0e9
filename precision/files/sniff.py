"""What a file is when it is not safetensors, recognised by its first bytes."""

_AGAIN = "Delete it and download it again"
_CONVERT = "Load it with ComfyUI's own loader and save it as .safetensors, or use a .safetensors version"

_STARTS = (
    (
        b"version https://git-lfs",
        "a git-LFS pointer, not the model itself",
        "Run 'git lfs pull', or download the file.",
    ),
    (
        b"GGUF",
        "a GGUF file",
        "Load it with ComfyUI-GGUF and connect its MODEL to any Halfsafe node.",
    ),
    (b"PK\x03\x04", "a zip archive, as PyTorch's .ckpt, .pt and .pth files are", f"{_CONVERT}."),
    (b"\x80\x02", "a Python pickle, as old .ckpt and .pt files are", f"{_CONVERT}."),
    (b"\x1f\x8b", "a gzip archive", "Unpack it."),
    (b"\x89HDF", "an HDF5 file", "Use a .safetensors version."),
)


def describe_other_format(head: bytes) -> tuple[str, str]:
    """Return problem and advice for a file that begins with ``head`` and has no plausible safetensors header."""
    if not head:
        return "empty, 0 bytes", f"{_AGAIN}."
    for start, problem, advice in _STARTS:
        if head.startswith(start):
            return problem, advice
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] == b"<":
        return "a web page (HTML), not a model", f"{_AGAIN}: the site may ask you to log in or to accept a licence."
    if len(text) > 3 and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in text[:64]):
        shown = text[:60].decode("ascii").splitlines()[0]
        return f"a text file that begins {shown!r}, not a model", f"{_AGAIN}: the site may have answered with an error."
    if len(head) < 9:
        return f"only {len(head)} bytes long", f"{_AGAIN}."
    length = int.from_bytes(head[:8], "little")
    return f"no safetensors file (a header of {length} bytes is impossible, or does not begin with '{{')", f"{_AGAIN}."
