//! Recipes of the stock templates, embedded in the program.
//!
//! A *recipe* is the source of a stock template: a directory with its packages, files and settings.

/// An embedded recipe: its name, and pairs of file name and content.
pub(super) type StockRecipe = (&'static str, &'static [(&'static str, &'static str)]);

/// Embeds the files of a recipe.
macro_rules! files {
    ($directory:literal: $($name:literal),*) => {
        &[$((
            $name,
            include_str!(concat!("../../../../templates/", $directory, "/", $name)),
        )),*]
    };
}

pub(super) const STOCK: [StockRecipe; 8] = [
    ("base", files!("base": "recipe.toml", "customize")),
    (
        "browser",
        files!("browser": "recipe.toml", "customize", "authorities.py", "browser.py", "relay.py"),
    ),
    (
        "code-interpreter-v1",
        files!(
            "code-interpreter-v1": "recipe.toml", "customize", "charts.py", "contexts.py", "identity.py",
            "kernel.py", "node.js", "output.py", "pipe_context.py", "python_context.py",
            "requirements.txt", "server.py"
        ),
    ),
    ("desktop", files!("desktop": "recipe.toml", "customize")),
    (
        "docker",
        files!("docker": "recipe.toml", "customize", "start"),
    ),
    (
        "functions-builder",
        files!(
            "functions-builder": "recipe.toml", "customize", "cargo.toml", "package.json",
            "requirements.txt", "wasm-component-ld.mjs"
        ),
    ),
    (
        "mcp-gateway",
        files!(
            "mcp-gateway": "recipe.toml", "customize", "gateway.py", "requirements.txt", "servers.json"
        ),
    ),
    (
        "node",
        files!("node": "recipe.toml", "customize", "requirements.txt"),
    ),
];

/// Returns the names of the stock templates.
pub fn stock_names() -> impl Iterator<Item = &'static str> {
    STOCK.iter().map(|(name, _)| *name)
}

/// Returns whether `name` is the name of a stock template.
pub(super) fn is_stock(name: &str) -> bool {
    stock_names().any(|known| known == name)
}
