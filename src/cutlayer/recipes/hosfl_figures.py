"""The figures of the HO-SFL paper that show accuracies; Figure 5 is `cutlayer overlap`."""

from cutlayer.config import Run
from cutlayer.recipes import published
from cutlayer.recipes.compose import named
from cutlayer.recipes.hosfl import ON_IMAGES, ON_TEXTS, hosfl, images
from cutlayer.recipes.hosfl_tables import ON_ORDER, llama, panels
from cutlayer.recipes.recipe import Apart, Recipe, Sweep

LAYERS = (2, 4, 6, 8)  # Figure 7
PERTURBATIONS = (1, 2, 5, 10, 20, 50)  # Figure 8(a), with
FIXED_SMOOTHING = 1e-4
SMOOTHINGS = (1e-5, 1e-4, 1e-3, 1e-2)  # Figure 8(b), with
FIXED_PERTURBATIONS = 10


def hosfl_fig3() -> Recipe:
    """HO-SFL, Figure 3: accuracy against processed samples on CIFAR-10, the runs of Table 2."""
    return _curves("hosfl_fig3", "cifar10", ON_ORDER)


def hosfl_fig6() -> Recipe:
    """HO-SFL, Figure 6: accuracy against processed samples on CIFAR-100, the runs of Table 2."""
    return _curves("hosfl_fig6", "cifar100", ("HO-SFL ends above SFL, and zeroth-order methods do not converge.",))


def _curves(name: str, data: str, claims: tuple[str, ...]) -> Recipe:
    return Recipe(
        runs=named(name, panels(data)),
        source=f"HO-SFL, Figure {name[-1]}",
        claims=claims,
        notes=("The paper's curves are of ten seeds: --seeds 10.", *ON_IMAGES),
        axis="samples",
    )


def hosfl_fig7() -> Recipe:
    """HO-SFL, Figure 7: 2, 4, 6 and 8 layers of LLaMA-3.2-1B at the client, on SST-2."""
    name = "hosfl_fig7"
    return Recipe(
        runs=named(name, {"llama-sst2": {f"cut{n}": hosfl(llama("sst2", layers=n), perturbations=2) for n in LAYERS}}),
        source="HO-SFL, Figure 7",
        published=published.HOSFL_FIG7.by_run(name),
        claims=("The more layers a client has, the slower HO-SFL converges, but only slightly.",),
        notes=("The paper says approx. 94.5 % and around 93.0 %.", *ON_TEXTS),
        axis="samples",
    )


def hosfl_fig8() -> Recipe:
    """HO-SFL, Figure 8: the number of perturbations, and how far they go, on CIFAR-10."""
    name, setting = "hosfl_fig8", images("cifar10", "iid")
    by_number = [(number, FIXED_SMOOTHING) for number in PERTURBATIONS]
    by_distance = [(FIXED_PERTURBATIONS, distance) for distance in SMOOTHINGS]
    runs = {
        f"p{number}-mu{distance:.0e}": hosfl(setting, perturbations=number, smoothing=distance)
        for number, distance in dict.fromkeys(by_number + by_distance)
    }
    return Recipe(
        runs=named(name, {"cifar10-iid": runs}),
        source="HO-SFL, Figure 8",
        claims=(
            "Accuracy rises with the number of perturbations.",
            "It falls where a perturbation goes further than 1e-3, and where one is too small for the arithmetic.",
        ),
        notes=(
            "The paper gives the ends, 1 to 50 and 1e-5 to 1e-2, and not the values between; nor the partition (IID).",
            *ON_IMAGES,
        ),
        axis="samples",
        figure=(
            Sweep(label="perturbations", x=_perturbations, series=_method, log=True),
            Sweep(label="smoothing", x=_smoothing, series=_method, log=True),
        ),
    )


def _perturbations(run: Run) -> float | Apart:
    options = run.method.options
    return float(options["perturbations"]) if options["smoothing"] == FIXED_SMOOTHING else Apart.ABSENT


def _smoothing(run: Run) -> float | Apart:
    options = run.method.options
    return float(options["smoothing"]) if options["perturbations"] == FIXED_PERTURBATIONS else Apart.ABSENT


def _method(run: Run) -> str:
    return run.method.name
