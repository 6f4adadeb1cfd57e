# TEMPORARY STUB
import sys
from pathlib import Path

START = None


def pass_by_settings():
    pass


def settings_from():
    return []


def forget_settings_from():
    pass


def words():
    return []


def begun():
    return ["python", "train.py"]


def program():
    return ["python", "train.py"]


def note_begun(*a):
    pass


def place():
    return Path.cwd()


def file_of_checkout(name):
    p = Path(__file__).parents[1] / name
    return p if p.is_file() else None


def importable():
    return None


def enter(*a):
    pass


def make_importable(*a):
    pass


def is_own(*a):
    return True
