"""An image classifier gives the head's input and xi = softmax - onehot; what is not a classifier is refused."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

from grasp.errors import ModelError
from grasp.features.extract import extract_images
from grasp.models.classifier import ImageClassifier, preprocessed
from grasp.models.fitted_head import FittedHead, fit_linear
from grasp.settings import ImageSettings, build_settings
from tests.models.images_world import TinyNet, encoded, picture, pictures, settings, write_weights


def load(root, **changes):
    return ImageClassifier.load(build_settings(settings(root, **changes)).model)


def test_hidden_is_what_the_head_reads_and_the_residual_its_gradient(tmp_path):
    model = load(tmp_path)
    images, classes = pictures(5)
    pixels = model.pixels(images)
    found = extract_images(model, pixels, torch.tensor(classes), 2, top_k=64)
    net = TinyNet()
    net.load_state_dict(model.model.state_dict())
    torch.testing.assert_close(found.hidden_PH, net.features(pixels))
    for i, label in enumerate(classes):
        net.zero_grad()
        loss = nn.functional.cross_entropy(net(pixels[i : i + 1]), torch.tensor([label]))
        loss.backward()
        xi = torch.zeros(3).scatter_add_(0, found.residual.index_PK[i], found.residual.value_PK[i])
        torch.testing.assert_close(torch.outer(xi, found.hidden_PH[i]), net.head.weight.grad, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found.residual.loss_P[i], loss.detach())


@pytest.mark.parametrize("factory", ["TinyNet", "made"])
def test_a_class_and_an_annotated_function_make_models(tmp_path, factory):
    model = load(tmp_path, model__classifier__factory=f"tests.models.images_world:{factory}")
    assert (model.vocab_size, model.hidden_size) == (3, 10)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("head", "fc", "TinyNet has no module `fc`; its linear layers: head"),
        ("head", "body", "`body` of TinyNet is a Sequential, expected a linear layer; its linear layers: head"),
        ("factory", "tests.models.images_world:Scaled", "`head` is not the last layer of Scaled: its output of shape"),
        ("factory", "tests.models.images_world:Grid", "`head` was called 1 times, with inputs of shape"),
        ("factory", "tests.models.images_world:not_annotated", "expected a class of torch.nn.Module"),
        ("factory", "os:system", "expected a class of torch.nn.Module"),
        ("factory", "tests.models.images_world:nothing", "has no attribute 'nothing'"),
        ("factory", "no_such_package:Net", "No module named 'no_such_package'"),
        ("factory", "TinyNet", "expected package.module:name"),
        ("arguments", {"depth": 3}, "TinyNet failed with {'depth': 3}"),
        ("arguments", {"width": 12}, "does not fit TinyNet"),
        ("classes", ["a", "b"], "got 2 names, the head `head` has 3 outputs"),
        ("fitted_head", "nothing.safetensors", "not a fitted head: "),
    ],
)
def test_what_is_not_such_a_classifier_is_refused(tmp_path, field, value, said):
    with pytest.raises(ModelError) as caught:
        load(tmp_path, **{f"model__classifier__{field}": value})
    assert said in str(caught.value)


def test_weights_that_are_not_there_or_not_weights_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"model.path: `.*nothing.pth`: no such file"):
        load(tmp_path, model__path=str(tmp_path / "nothing.pth"))
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(ModelError, match="holds no weights that can be read"):
        load(tmp_path, model__path=str(tmp_path / "text.pth"))
    torch.save({"state_dict": TinyNet(seed=3).state_dict()}, tmp_path / "nested.pth")
    assert load(tmp_path, model__path=str(tmp_path / "nested.pth")).fingerprint() != load(tmp_path).fingerprint()


def test_modes_and_sizes_become_one_input():
    generator = np.random.default_rng(0)
    image = picture(1, generator, size=20)
    how = ImageSettings(size=8, mean=(0, 0, 0), std=(1, 1, 1))
    for mode in ("RGB", "L", "RGBA", "P", "CMYK", "1", "LA", "I;16"):
        content = encoded(image.convert("L").convert(mode) if mode == "I;16" else image.convert(mode), "TIFF")
        values = preprocessed(content, how)
        assert values.shape == (3, 8, 8)
        assert values.dtype == np.float32
        assert 0 <= values.min() <= values.max() <= 1
    wide = preprocessed(encoded(image.resize((40, 10))), ImageSettings(size=8, resize=10))
    assert wide.shape == (3, 8, 8)


def test_preprocessing_by_hand():
    image = picture(0, np.random.default_rng(1), size=8)
    found = preprocessed(encoded(image), ImageSettings(size=8))
    expected = (np.asarray(image) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(found, expected.transpose(2, 0, 1), atol=1e-6)


def test_hugging_face_classifiers_with_their_own_preprocessing(tmp_path):
    vit = ViTForImageClassification(
        ViTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
        )
    )
    resnet = ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=2)
    )
    own = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    for net, head in ((vit, "classifier"), (resnet, "classifier.1")):
        place = tmp_path / head
        net.save_pretrained(place)
        (place / "preprocessor_config.json").write_text(json.dumps(own))
        model = load(tmp_path, model__path=str(place), model__classifier={"head": head})
        assert model.classes == ("LABEL_0", "LABEL_1")
        assert model.images == ImageSettings(size=16, interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3)
        pixels = model.pixels(pictures(2)[0])
        torch.testing.assert_close(model.logits(model.hidden(pixels)), net.eval()(pixels).logits)


def test_a_fitted_head_is_logistic_regression_and_takes_the_place_of_the_models(tmp_path):
    linear_model = pytest.importorskip("sklearn.linear_model")
    generator = np.random.default_rng(2)
    hidden, label = generator.normal(size=(60, 10)), generator.integers(0, 4, size=60)
    weight, bias = fit_linear(hidden, label, 4, decay=0.05)
    theirs = linear_model.LogisticRegression(C=1 / (0.05 * 60), tol=1e-9, max_iter=2000).fit(hidden, label)
    np.testing.assert_allclose(weight - weight.mean(0), theirs.coef_ - theirs.coef_.mean(0), atol=1e-4)
    np.testing.assert_allclose(bias - bias.mean(), theirs.intercept_ - theirs.intercept_.mean(), atol=1e-4)

    path = tmp_path / "head.safetensors"
    FittedHead(torch.from_numpy(weight), torch.from_numpy(bias), ["a", "b", "c", "d"]).write(path)
    model = load(tmp_path, model__classifier__fitted_head=str(path), model__classifier__classes=[])
    assert model.classes == ("a", "b", "c", "d")
    hidden_PH = torch.randn(3, 10)
    expected = hidden_PH.double().numpy() @ weight.T + bias
    np.testing.assert_allclose(model.logits(hidden_PH).numpy(), expected, atol=1e-4)
    write_weights(tmp_path / "wide.safetensors", TinyNet(width=12))
    with pytest.raises(ModelError, match="it reads 10 features, `head` of the model 12"):
        load(
            tmp_path,
            model__path=str(tmp_path / "wide.safetensors"),
            model__classifier__arguments={"width": 12},
            model__classifier__fitted_head=str(path),
        )
