""" What train.py is made of: accounting, evaluation, optimizers, checkpoints, the log, the machine. """
