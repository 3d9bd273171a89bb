"""Callbacks for other libraries' loops; each module needs its library (the extras `hf` and `lightning`)."""
