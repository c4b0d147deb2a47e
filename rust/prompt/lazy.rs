//! Python values that can be walked but are no lists: generators, which the lazy filters give, and the views that `dict.items()` gives.
//!
//! They matter where a template asks `is sequence`, serialises, or walks twice.

use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{Enumerator, Object, ObjectRepr};
use minijinja::{Error, Value};

/// What a lazy filter (`map`, `select`, `reject`, …) gives in Python: true even when empty, walked once, without a length, not serialisable.
#[derive(Debug)]
pub(super) struct Generator(Mutex<std::vec::IntoIter<Value>>);

impl Generator {
    /// Wraps the items of `values`, which a minijinja filter has already worked out.
    pub(super) fn wrap(values: &Value) -> Result<Value, Error> {
        let items: Vec<Value> = values.try_iter()?.collect();
        Ok(Value::from_object(Self(Mutex::new(items.into_iter()))))
    }
}

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let source = Arc::clone(self);
        Enumerator::Iter(Box::new(std::iter::from_fn(move || source.0.lock().unwrap_or_else(PoisonError::into_inner).next())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn render(self: &Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("<generator object>")
    }
}

/// What `dict.items()` and its kin give: a length and any number of walks, but no sequence and not serialisable.
#[derive(Debug)]
pub(super) struct View {
    name: &'static str,
    items: Vec<Value>,
}

impl View {
    /// A view called `name`, such as `dict_items`, of these items.
    pub(super) fn wrap(name: &'static str, items: Vec<Value>) -> Value {
        Value::from_object(Self { name, items })
    }
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items.clone())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.items.len())
    }

    fn render(self: &Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}({})", self.name, Value::from(self.items.clone()))
    }
}

/// Whether `value` can be walked but is neither a list nor a dict in Python.
pub(super) fn is_lazy(value: &Value) -> bool {
    value.downcast_object_ref::<Generator>().is_some() || value.downcast_object_ref::<View>().is_some()
}
