//! The command line of `emberd omp`.

use clap::{Args, Subcommand};

/// `emberd omp …`
#[derive(Debug, Clone, Subcommand)]
pub enum Omp {
    /// Put emberd where omp starts its worker for MLX, or keep workers for its other local models running
    Install(Install),
    /// Remove what `emberd omp install` has put there
    Uninstall {
        /// Show what would be done, and do nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Show what is installed, whether omp would start it, and which workers answer
    Status,
}

/// Settings of `emberd omp install`.
#[derive(Debug, Clone, Args)]
pub struct Install {
    /// Show what would be written, and write nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Instead: have the system keep a worker for this model of omp's running; may be given several times
    #[arg(long, value_name = "KEY")]
    pub keep: Vec<String>,
    /// What the kept workers' pongs carry [default: what the omp on the PATH expects]
    #[arg(long, value_name = "TAG", requires = "keep")]
    pub tag: Option<String>,
    /// The model behind the kept workers' keys: a name, a model folder or a .gguf file [default: omp's own]
    #[arg(long, env = "EMBERD_WORKER_MODEL", value_name = "NAME|PATH", hide_env_values = true)]
    pub model: Option<String>,
    /// Move a Python environment of omp's that is in the way aside, until emberd is uninstalled
    #[arg(long, conflicts_with = "keep")]
    pub replace: bool,
}
