"""The commands of `python -m refimpl`: train.py, demo.py, doctor.py."""
