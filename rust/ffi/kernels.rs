//! What ONNX Runtime takes of this library: operators of its own, and graphs that use them.

#![allow(unsafe_code)] // The runtime looks the operators up by name and calls them through C.

use emberd::engine::Activations;
use emberd::models::onnx::fuse::{self, Wanted};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Adds emberd's operators to a session's options: the function that ONNX Runtime looks for in a library of operators.
///
/// # Safety
/// Called by ONNX Runtime with its own pointers.
#[unsafe(no_mangle)]
#[allow(non_snake_case, unreachable_pub)]
pub unsafe extern "system" fn RegisterCustomOps(
    options: *mut emberd_kernels::OrtSessionOptions,
    base: *const emberd_kernels::OrtApiBase,
) -> emberd_kernels::OrtStatusPtr {
    // SAFETY: the pointers are the runtime's.
    unsafe { emberd_kernels::register(options, base) }
}

/// An imported graph with emberd's operators (`own`) and with these activations; `None` where nothing of it is to be changed, or where another program wrote it. `int16` needs
/// emberd's operators, and is `float` without them, and for matrices or processors that they have no products for; `float` means 8 bits for codes of 8 bits, as the runtime has no other product for them.
#[pyfunction]
pub(crate) fn rewritten<'py>(py: Python<'py>, model: &[u8], own: bool, activations: &str) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let activations: Activations = crate::port::named("activations", activations)?;
    let wanted = Wanted {
        heads: own.then_some(emberd_kernels::ops::head),
        products: (own && activations == Activations::Int16).then_some(emberd_kernels::ops::product),
        int8: activations == Activations::Int8,
    };
    Ok(py.detach(|| fuse::rewritten(model, &wanted)).map(|model| PyBytes::new(py, &model)))
}
