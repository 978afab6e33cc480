"""An image classifier gives the input of its head and xi = softmax - onehot; other modules are refused."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoImageProcessor,
    ConvNextImageProcessor,
    MobileNetV2ImageProcessor,
    MobileViTImageProcessor,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from experiments.vision.fit_head import fit_linear
from grasp.errors import ModelError
from grasp.settings import ModelSettings, build_settings
from grasp.vision.classifier import ImageClassifier
from grasp.vision.factory import make_module, user_code
from grasp.vision.images import decode_image
from grasp.vision.preprocessing import HuggingFaceProcessor, ResizeAndCrop, default_preprocessing
from grasp.vision.settings import ClassifierSettings, ImageSettings
from tests.rounding import rounding
from tests.vision.images_world import TinyNet, encoded, picture, pictures, settings, write_weights


def load(root, **changes):
    return ImageClassifier.load(build_settings(settings(root, **changes)).model)


@pytest.mark.parametrize("factory", ["TinyNet", "make_net"])  # a class, and a function that says what it gives
def test_hidden_states_are_inputs_of_the_head_and_residuals_its_gradients(tmp_path, factory):
    model = load(tmp_path, model__classifier__factory=f"tests.vision.images_world:{factory}")
    assert (model.vocab_size, model.hidden_size) == (3, 10)
    images, classes = pictures(5)
    pixels = model.pixels(images)
    result = model.features(pixels, torch.tensor(classes), top_k=64)
    net = TinyNet()
    net.load_state_dict(model.model.state_dict())
    torch.testing.assert_close(result.hidden_PH, net.features(pixels))
    for i, label in enumerate(classes):
        net.zero_grad()
        loss = nn.functional.cross_entropy(net(pixels[i : i + 1]), torch.tensor([label]))
        loss.backward()
        xi = torch.zeros(3).scatter_add_(0, result.residual.index_PK[i], result.residual.value_PK[i])
        close = rounding(3 + 10, net.head.weight.grad)  # logits, and the sum over three classes
        torch.testing.assert_close(torch.outer(xi, result.hidden_PH[i]), net.head.weight.grad, rtol=0, atol=close)
        torch.testing.assert_close(result.residual.loss_P[i], loss.detach())


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("head", "fc", r"`fc` of TinyNet is no module.*\bhead"),
        ("head", "body", r"`body`.*TinyNet.*Sequential"),
        ("factory", "tests.vision.images_world:Scaled", r"`head`.*Scaled"),
        ("factory", "tests.vision.images_world:Grid", r"`head`.*\b1 times"),
        ("factory", "tests.vision.images_world:not_annotated", r"torch\.nn\.Module"),
        ("factory", "os:system", r"torch\.nn\.Module"),
        ("factory", "tests.vision.images_world:nothing", "no attribute 'nothing'"),
        ("factory", "no_such_package:Net", "No module named 'no_such_package'"),
        ("factory", "TinyNet", r"package\.module:name.*FILE\.py:name"),
        ("arguments", {"depth": 3}, r"TinyNet.*\{'depth': 3\}"),
        ("arguments", {"width": 12}, "fit TinyNet"),
        ("classes", ["a", "b"], r"\b2 names.*`head`.*\b3 outputs"),
        ("fitted_head", "nothing.safetensors", "fitted head"),
        ("path", "nothing.pth", r"model\.path: `nothing\.pth`: no such"),
        ("path", "text.pth", "cannot read weights"),
        ("factory", "safetensors:Net", "no attribute 'Net'"),  # a directory of the user does not shadow a package
    ],
)
def test_modules_that_are_not_classifiers_are_refused(tmp_path, monkeypatch, field, value, pattern):
    monkeypatch.chdir(tmp_path)
    Path("text.pth").write_text("no weights")
    Path("safetensors").mkdir()
    Path("safetensors", "__init__.py").write_text("raise RuntimeError")
    with pytest.raises(ModelError) as caught:
        load(tmp_path, **{"model__path" if field == "path" else f"model__classifier__{field}": value})
    assert re.search(pattern, str(caught.value))


def test_weights_may_be_nested_under_a_name(tmp_path):
    torch.save({"state_dict": TinyNet(seed=3).state_dict()}, tmp_path / "nested.pth")
    assert load(tmp_path, model__path=str(tmp_path / "nested.pth")).fingerprint() != load(tmp_path).fingerprint()


def test_modes_and_sizes_become_one_input():
    generator = np.random.default_rng(0)
    image = picture(1, generator, size=20)
    how = ImageSettings(size=8, mean=(0, 0, 0), std=(1, 1, 1))
    for mode in ("RGB", "L", "RGBA", "P", "CMYK", "1", "LA", "I;16"):
        content = encoded(image.convert("L").convert(mode) if mode == "I;16" else image.convert(mode), "TIFF")
        values = ResizeAndCrop(how)(decode_image(content))
        assert values.shape == (3, 8, 8)
        assert values.dtype == np.float32
        assert 0 <= values.min() <= values.max() <= 1
    wide = ResizeAndCrop(ImageSettings(size=8, resize=10))(image.resize((40, 10)))
    assert wide.shape == (3, 8, 8)


def test_preprocessing_by_hand():
    image = picture(0, np.random.default_rng(1), size=8)
    actual = ResizeAndCrop(ImageSettings(size=8))(image)
    expected = (np.asarray(image) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(actual, expected.transpose(2, 0, 1), rtol=0, atol=rounding(3, expected))


def tiny_vit():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8))


def photograph(width, height):
    small = np.random.default_rng(0).integers(0, 256, size=(12, 20, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("size", [(256, 256), (300, 180), (31, 200)], ids=str)
@pytest.mark.parametrize(
    "processor",
    [
        ViTImageProcessor(),
        ViTImageProcessor(do_normalize=False, do_rescale=False),
        ConvNextImageProcessor(size={"shortest_edge": 224}, crop_pct=224 / 256),
        ConvNextImageProcessor(size={"shortest_edge": 384}),
        MobileViTImageProcessor(),
        MobileNetV2ImageProcessor(),
    ],
    ids=lambda processor: type(processor).__name__,
)
def test_preprocessing_of_a_checkpoint_equals_that_of_its_processor(tmp_path, processor, size):
    processor.save_pretrained(tmp_path)
    image = photograph(*size)
    actual = HuggingFaceProcessor.from_settings(ModelSettings(path=str(tmp_path)))(image)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil", use_fast=False)
    expected = np.asarray(theirs(image, return_tensors="np")["pixel_values"][0], np.float32)
    np.testing.assert_array_equal(actual, expected)


def test_hugging_face_classifiers_with_their_own_preprocessing(tmp_path):
    resnet = ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=2)
    )
    processor = ViTImageProcessor(size={"height": 16, "width": 16}, resample=3)
    fingerprints = set()
    for net, head in ((tiny_vit(), "classifier"), (resnet, "classifier.1")):
        place = tmp_path / head
        net.save_pretrained(place)
        processor.save_pretrained(place)
        model = load(tmp_path, model__path=str(place), model__classifier={"head": head})
        assert model.classes == ("LABEL_0", "LABEL_1")
        pixels = model.pixels(pictures(2)[0])
        torch.testing.assert_close(model.logits(model.hidden(pixels)), net.eval()(pixels).logits)
        fingerprints.add(model.reader[1])
    assert len(fingerprints) == 1
    ViTImageProcessor(size={"height": 16, "width": 16}, do_normalize=False).save_pretrained(place)
    other = load(tmp_path, model__path=str(place), model__classifier={"head": head})
    assert other.reader[1] not in fingerprints
    overrides = {"head": head, "images": {"size": 16}}
    assert load(tmp_path, model__path=str(place), model__classifier=overrides).preprocessing == ResizeAndCrop(
        ImageSettings(size=16)
    )


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        (None, "image processor.*transformers"),
        ("{", "image processor.*transformers"),
        ('{"image_processor_type": "NoSuchProcessor"}', "image processor.*transformers"),
        ('{"size": "wide"}', r"model\.classifier\.images"),
        ('{"do_resize": false}', r"failed.*\(3, 96, 160\)"),
        ('{"size": {"height": 24, "width": 24}}', r"failed.*\(3, 24, 24\)"),
    ],
)
def test_missing_preprocessing_is_refused_in_one_line(tmp_path, file, pattern):
    tiny_vit().save_pretrained(tmp_path / "vit")
    if file is not None:
        (tmp_path / "vit" / "preprocessor_config.json").write_text(file)
    with pytest.raises(ModelError) as caught:
        load(tmp_path, model__path=str(tmp_path / "vit"), model__classifier={"head": "classifier"})
    assert re.search(pattern, str(caught.value))
    assert "model.classifier.images" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_images_of_different_size_are_refused(tmp_path):
    ViTImageProcessor(do_resize=False).save_pretrained(tmp_path)
    processor = HuggingFaceProcessor.from_settings(ModelSettings(path=str(tmp_path)))
    model = ImageClassifier(TinyNet(), build_settings(settings(tmp_path)).model.classifier, processor)
    with pytest.raises(ModelError, match=r"\(3, 12, 12\), \(3, 20, 20\)"):
        model.pixels([encoded(picture(0, np.random.default_rng(0), size)) for size in (12, 20)])


def test_a_timm_model_uses_the_preprocessing_of_timm():
    data, timm = pytest.importorskip("timm.data"), pytest.importorskip("timm")
    for name in ("resnet18", "vit_tiny_patch16_224", "convnext_atto"):
        net = timm.create_model(name)
        transform = data.create_transform(**data.resolve_model_data_config(net), is_training=False)
        for size in ((256, 256), (300, 180)):
            image = photograph(*size)
            np.testing.assert_array_equal(default_preprocessing(net)(image), transform(image).numpy())


NET = """
import torch
from beside import WIDTH

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(WIDTH, 3)

    def forward(self, pixels):
        return self.fc(pixels.mean(dim=(2, 3)))
"""


def test_a_user_module_is_loaded_from_the_current_directory_or_a_file(tmp_path):
    (tmp_path / "lib").mkdir()
    for place, name, width in ((tmp_path, "own_net", 3), (tmp_path / "lib", "far_net", 4)):
        (place / f"{name}.py").write_text(NET.replace("beside", f"beside_{name}"))
        (place / f"beside_{name}.py").write_text(f"WIDTH = {width}")
    names = ("own_net:Net", "own_net.py:Net", "lib/far_net.py:Net")
    code = (
        "from grasp.vision.factory import make_module; from grasp.vision.settings import ClassifierSettings\n"
        f"print([make_module(ClassifierSettings(head='fc', factory=name)).fc.in_features for name in {names}])"
    )
    # -P as in a console script: the current directory is not where Python looks by itself
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[3, 3, 4]", done.stderr


def test_the_code_of_a_user_module_is_part_of_its_fingerprint(tmp_path):
    code = NET.replace("from beside import WIDTH", "WIDTH = 3")
    prints = []
    for change in ("mean", "amax", "mean"):
        (tmp_path / f"{change}.py").write_text(code.replace("mean", change))
        settings = ClassifierSettings(head="fc", factory=f"{tmp_path / change}.py:Net")
        model = make_module(settings)
        torch.nn.init.zeros_(model.fc.weight)
        torch.nn.init.zeros_(model.fc.bias)
        prints.append(ImageClassifier(model, settings, None).fingerprint())
    assert prints[0] == prints[2] != prints[1]
    assert user_code(torch.nn.Linear(2, 2)) == b"", "an installed package changes with every version of it"


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("class Net(:", r"SyntaxError: .*net\.py, line 1"),
        ("import no_such_package", "No module named 'no_such_package'"),
        ("1 / len('')", "ZeroDivisionError: "),
        ("Net = 3", r"torch\.nn\.Module"),
        ("class Odd(Exception): ...\nraise Odd('of its own')", "Odd: of its own"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("def Net() -> 'unknown.Name': ...", r"torch\.nn\.Module"),
        (None, "no such file"),
    ],
)
def test_a_file_without_such_a_module_is_refused(tmp_path, content, pattern):
    if content is not None:
        (tmp_path / "net.py").write_text(content)
    with pytest.raises(ModelError) as caught:
        load(tmp_path, model__classifier__factory=f"{tmp_path / 'net.py'}:Net")
    assert str(caught.value).startswith(f"model.classifier.factory: '{tmp_path / 'net.py'}:Net': ")
    assert re.search(pattern, str(caught.value))


def test_a_fitted_head_equals_logistic_regression_and_replaces_that_of_the_model(tmp_path):
    linear_model = pytest.importorskip("sklearn.linear_model")
    generator = np.random.default_rng(2)
    hidden, label = generator.normal(size=(60, 10)), generator.integers(0, 4, size=60)
    weight, bias = fit_linear(hidden, label, 4, decay=0.05)
    theirs = linear_model.LogisticRegression(C=1 / (0.05 * 60), tol=1e-9, max_iter=2000).fit(hidden, label)
    np.testing.assert_allclose(weight - weight.mean(0), theirs.coef_ - theirs.coef_.mean(0), atol=1e-4)
    np.testing.assert_allclose(bias - bias.mean(), theirs.intercept_ - theirs.intercept_.mean(), atol=1e-4)

    path = tmp_path / "head.safetensors"
    tensors = {"weight": torch.from_numpy(weight).float(), "bias": torch.from_numpy(bias).float()}
    save_file(tensors, path, metadata={"classes": '["a", "b", "c", "d"]'})
    model = load(tmp_path, model__classifier__fitted_head=str(path), model__classifier__classes=[])
    assert model.classes == ("a", "b", "c", "d")
    hidden_PH = torch.randn(3, 10)
    expected = hidden_PH.double().numpy() @ weight.T + bias
    np.testing.assert_allclose(model.logits(hidden_PH).numpy(), expected, rtol=0, atol=rounding(10, expected))
    write_weights(tmp_path / "wide.safetensors", TinyNet(width=12))
    wide = {"model__path": str(tmp_path / "wide.safetensors"), "model__classifier__arguments": {"width": 12}}
    with pytest.raises(ModelError, match=r"\b10 inputs.*`head`.*\b12\b"):
        load(tmp_path, **wide, model__classifier__fitted_head=str(path))
    for changes in ({"bias": torch.zeros(3)}, {"weight": torch.zeros(4)}, {"classes": "3"}, {"classes": '["a"]'}):
        metadata = {"classes": changes.pop("classes", '["a", "b", "c", "d"]')}
        save_file(tensors | changes, path, metadata=metadata)
        with pytest.raises(ModelError, match=r"head\.safetensors: not a fitted head: .*classes x inputs"):
            load(tmp_path, model__classifier__fitted_head=str(path))
