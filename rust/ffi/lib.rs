//! The extension module `emberd._core`: everything that Python sees of the core stands in this list.
//!
//! [`port`] is the crossing, with [`sampling`] and [`constraint`]; [`app`] starts the process and hands out engines to load. [`kernels`] has what ONNX Runtime takes of this library: operators, and graphs that use them. Nothing here knows doors, text or models.

mod app;
mod constraint;
mod doors;
mod kernels;
mod port;
mod sampling;

/// What Python sees.
#[pyo3::pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::app::{App, graphs, start};
    #[pymodule_export]
    use crate::constraint::{Constraint, constraint};
    #[pymodule_export]
    use crate::doors::{Doors, Reader, port};
    #[pymodule_export]
    use crate::kernels::rewritten;
    #[pymodule_export]
    use crate::port::{Admit, Cancel, Capabilities, Forget, Launch, Port, PortError, Settings};
    #[pymodule_export]
    use crate::sampling::Sampling;
}
