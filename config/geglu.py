# (gelu(x Wg) * x W1) W2, erf form
#   python train.py config/geglu.py
ffn = 'geglu'
