"""The commands of `python -m refimpl`: train.py, tokenize.py, demo.py, doctor.py."""
