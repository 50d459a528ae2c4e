"""Layer types by their names in a prototxt. A new type is one class and one row here."""

from worker.caffe.data_layers import Data, Input, MemoryData
from worker.caffe.dense_layers import Dropout, InnerProduct, ReLU
from worker.caffe.image_layers import Convolution, Pooling
from worker.caffe.layer import Layer
from worker.caffe.loss_layers import Accuracy, Softmax, SoftmaxWithLoss

LAYERS: dict[str, type[Layer]] = {
    "Data": Data,
    "MemoryData": MemoryData,
    "Input": Input,
    "Convolution": Convolution,
    "Pooling": Pooling,
    "InnerProduct": InnerProduct,
    "ReLU": ReLU,
    "Dropout": Dropout,
    "Softmax": Softmax,
    "SoftmaxWithLoss": SoftmaxWithLoss,
    "Accuracy": Accuracy,
}
