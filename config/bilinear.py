# (x Wg * x W1) W2
#   python train.py config/bilinear.py
ffn = 'bilinear'
