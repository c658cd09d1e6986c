//! Builds a template with this crate only: `cargo run --release --example build_template -- base`.

use jiffy_image::{Home, Progress, Recipe, Templates};
use std::error::Error;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "base".to_owned());
    let directory = Path::new(&name);
    let recipe = if directory.join("recipe.toml").exists() {
        Recipe::from_directory(directory)?
    } else {
        Recipe::built_in(&name)?
    };
    let start = Instant::now();
    let mut shown = 0;
    let template = jiffy_image::build_if_needed(
        &Templates::new(&Home::locate()?),
        &recipe,
        &mut |progress| match progress {
            Progress::Phase(phase) => {
                println!("{:6.1} s  {phase}", start.elapsed().as_secs_f32())
            }
            Progress::Percent(percent) if percent >= shown + 10 => {
                shown = percent;
                println!("{:6.1} s  {percent} %", start.elapsed().as_secs_f32());
            }
            _ => {}
        },
    )?;
    println!(
        "{:6.1} s  {}",
        start.elapsed().as_secs_f32(),
        template.images[0].path.display()
    );
    println!("{:#?}", template.manifest);
    Ok(())
}
