"""Search for hyper-parameters: trials are runs of several ranks, proposed by Optuna, and a journal keeps them all."""
