# (sigmoid(x Wg) * x W1) W2 (Dauphin et al. 2017)
#   python train.py config/glu.py
ffn = 'glu'
