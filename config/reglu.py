# (relu(x Wg) * x W1) W2
#   python train.py config/reglu.py
ffn = 'reglu'
