"""Golden values: numbers of every public instrument, verdict and table, held while the code behind them moves."""
