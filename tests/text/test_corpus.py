"""Localises texts read in an order that differs between machines, parts that are lost or read twice, and files not named."""
import os

import pytest

from refimpl.text import read_text


@pytest.fixture
def folder(tmp_path):
    """Made in an order that is not the sorted one, with what must be left out beside it."""
    root = tmp_path / "corpus"
    for name, text in (("b.txt", "fifth"), ("a/z", "third"), ("a/10", "first"), ("a/9", "second"), ("a-b", "fourth"),
                       ("none", ""), (".hidden", "no"), (".git/config", "no"), ("a/.hidden/deep", "no")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return root


def test_a_file_is_read_byte_for_byte(tmp_path):
    (tmp_path / "text").write_bytes("a\r\n\ufeffé🚀\x00".encode())
    assert read_text(str(tmp_path / "text")) == "a\r\n\ufeffé🚀\x00"


def test_a_folder_is_its_files_in_sorted_order_with_blank_lines_between(folder):
    assert read_text(str(folder)) == "first\n\nsecond\n\nthird\n\nfourth\n\nfifth"
    assert read_text(str(folder) + "/") == read_text(str(folder))


def test_the_folder_itself_may_have_a_dot_or_be_a_link(folder):
    (folder.parent / "link").symlink_to(folder)
    hidden = folder.rename(folder.parent / ".corpus")
    (folder.parent / "link").unlink()
    (folder.parent / "link").symlink_to(hidden)
    assert read_text(str(hidden)) == read_text(str(folder.parent / "link")) != ""


def test_a_linked_file_is_read_and_a_linked_folder_is_not(folder):
    (folder / "c.txt").symlink_to(folder / "b.txt")
    (folder / "loop").symlink_to(folder)
    assert read_text(str(folder)).endswith("fourth\n\nfifth\n\nfifth")


def test_a_bad_file_in_a_folder_is_named(folder):
    (folder / "a" / "latin1").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="corpus/a/latin1 is not utf-8: byte 3 is 0xe9"):
        read_text(str(folder))


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("nowhere"), os.mkfifo])
def test_what_is_no_file_is_named_and_nobody_waits_for_it(folder, make):
    make(folder / "a" / "odd")
    with pytest.raises(ValueError, match="corpus/a/odd is not a file"):
        read_text(str(folder))


def test_a_folder_that_cannot_be_listed_is_named(folder, monkeypatch):
    """(Permissions do not stop root, who may run the tests.)"""
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match="corpus/a cannot be read: Permission denied"):
        read_text(str(folder))


def test_a_folder_without_a_text_is_an_error(tmp_path):
    (tmp_path / ".hidden").write_text("no")
    with pytest.raises(ValueError, match=f"the folder {tmp_path} has no file"):
        read_text(str(tmp_path))
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(ValueError, match=f"the text {tmp_path} is empty"):
        read_text(str(tmp_path))


@pytest.mark.parametrize("path", ["", "missing", "/dev/null/deeper"])
def test_a_name_of_nothing_is_an_error(path):
    with pytest.raises(ValueError, match=f"the text {path} cannot be read: "):
        read_text(path)
