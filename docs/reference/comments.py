"""Writes copies of the public headers in which comments are comments that Doxygen reads.

    comments.py FOLDER      the copies, and start.dox: the start page and the groups

A comment before a declaration, or behind it on its line, describes it; the one at the top of a file
describes the file. Indented lines are code. What Doxygen would take for a command or a tag is escaped,
but for what stands in backticks. All that a header declares joins the group of its heading in
lockstep/lockstep.h; so do the headers that it includes itself, and the options (options.h, config.h)
that it takes.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMENT = re.compile(r"^(\s*)//(?: (.*))?$")
BEHIND = re.compile(r"^(.*[;,{}(] +)// (?!namespace)(.*)$")
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{$")
FORWARD = re.compile(r"^(?:template <.*> )?(?:class|struct|enum class) [^;{]*;$")
SKIPPED = re.compile(r"-{3,}|clang-format|NOLINT")


def escaped(text):
    pieces = re.split(r"(`[^`]*`)", text)
    pieces[::2] = [re.sub(r"([\\@<>&#%\"]|(?<!\w)::)", r"\\\1", piece) for piece in pieces[::2]]
    return "".join(pieces)


def groups():
    """The headings of lockstep/lockstep.h, each with its headers."""
    result = []
    for line in (ROOT / "lockstep/lockstep.h").read_text().splitlines():
        if line.startswith("// "):
            result.append((line[3:], []))
        elif line.startswith("#include"):
            result[-1][1].append(line.split("<")[1].split(">")[0])
    return [(heading, headers) for heading, headers in result if headers]


def included(header):
    text = (ROOT / header).read_text()
    return re.findall(r"^#include <(lockstep/[^>]+)>", text, re.M)


def documented():
    """Each header of the reference, and the heading that it stands under."""
    found = {header: heading for heading, headers in groups() for header in headers}
    for heading, headers in groups():
        seen, open_headers = set(headers), [(header, 0) for header in headers]
        while open_headers:
            header, depth = open_headers.pop(0)
            if depth <= 1 or header.endswith(("/options.h", "/config.h")):
                found.setdefault(header, heading)
            for one in included(header):
                if one not in seen:
                    seen.add(one)
                    open_headers.append((one, depth + 1))
    return found


def group_name(heading):
    return re.sub(r"\W+", "_", heading.split(":")[0].strip(".").lower())


def comment_lines(block, indent):
    """A block of lines without their slashes, as a comment of Doxygen's."""
    in_code = False
    for number, text in enumerate(block):
        is_code = text.startswith("  ") and (in_code or number == 0 or block[number - 1] == "")
        if is_code != in_code and (is_code or text):
            yield f"{indent}/// {'@code{.cpp}' if is_code else '@endcode'}"
            in_code = is_code
        yield f"{indent}/// {text if in_code else escaped(text)}"
    if in_code:
        yield f"{indent}/// @endcode"


def filtered(group, lines):
    index = 0
    block = []
    while index < len(lines) and lines[index].startswith("//"):
        block.append(lines[index][3:])
        index += 1
    yield "/// @file"
    yield from comment_lines(block, "")
    begin = f"/// @addtogroup {group}\n/// @{{"
    # Whether each namespace that is open here has members that users name.
    namespaces = []
    while index < len(lines):
        line = lines[index]
        match = COMMENT.match(line)
        behind = BEHIND.match(line)
        if match:
            indent, block = match[1], []
            while match:
                if not SKIPPED.match(match[2] or ""):
                    block.append(match[2] or "")
                index += 1
                match = COMMENT.match(lines[index]) if index < len(lines) else None
            # A comment by itself is about what follows until the next, and belongs to none of it.
            if index < len(lines) and lines[index].strip():
                yield from comment_lines(block, indent)
            continue
        index += 1
        if opened := NAMESPACE.match(line):
            end = index
            while FORWARD.match(lines[end]):
                end += 1
            if lines[end] == "}":
                index = end + 1
                continue
            if namespaces and namespaces[-1]:
                yield "/// @}"
            namespaces.append(not re.search("internal|names$", opened[1]))
            yield line
            if namespaces[-1]:
                yield begin
            continue
        if line.startswith("}  // namespace"):
            if namespaces.pop():
                yield "/// @}"
            yield line
            if namespaces and namespaces[-1]:
                yield begin
            continue
        if behind:
            block = [behind[2]]
            # It goes on in lines of nothing else, as far to the right.
            column = len(behind[1])
            while index < len(lines) and (more := COMMENT.match(lines[index])) and \
                    len(more[1]) == column:
                block.append(more[2] or "")
                index += 1
            yield behind[1] + "///< " + escaped(" ".join(block))
        else:
            yield line


def start_page():
    yield "/** @mainpage Lockstep\n"
    yield (ROOT / "docs/reference/start.md").read_text()
    yield "*/"
    for heading, _ in groups():
        title, _, what = heading.strip(".").partition(": ")
        yield f"/** @defgroup {group_name(heading)} {title}"
        if what:
            yield f"@brief {what[0].upper() + what[1:]}.\n"
        yield "*/"


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def main():
    folder = pathlib.Path(sys.argv[1])
    write(folder / "start.dox", start_page())
    for header, heading in documented().items():
        lines = (ROOT / header).read_text().splitlines()
        write(folder / header, filtered(group_name(heading), lines))


main()
