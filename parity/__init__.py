"""Golden values of TRL, verl and OpenRLHF, made by the installed libraries: see `make parity`."""
