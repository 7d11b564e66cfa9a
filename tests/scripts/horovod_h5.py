"""Rank 0 has an optimizer without momentum, as from an .h5 file, rank 1 one with it."""

import keras
import numpy as np

import lockstep.horovod as hvd

hvd.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9 * hvd.rank())), "mse")
model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
