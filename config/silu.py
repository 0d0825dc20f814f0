# silu(x W1) W2
#   python train.py config/silu.py
ffn = 'silu'
