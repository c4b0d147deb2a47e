//! What stands after `<tool_call>`, which several families write: a JSON object (Hermes, Qwen), `<function=` (Qwen-coder), or a name and pairs (GLM).

use super::json::Calls;
use super::xml::{self, Xml};
use super::{Emit, Step, blank, may_become};

/// The end of the region.
const CLOSE: &str = "</tool_call>";

#[derive(Debug, Default)]
pub(crate) enum Tagged {
    /// It is not known yet which.
    #[default]
    Start,
    Json(Box<Calls>),
    Xml(Box<Xml>),
}

impl Tagged {
    pub(super) fn step(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        match self {
            Self::Json(calls) => return calls.step(rest, emit),
            Self::Xml(calls) => return calls.step(rest, emit),
            Self::Start => {}
        }
        let start = blank(rest);
        let after = rest.get(start..).unwrap_or_default();
        *self = match after.bytes().next() {
            None => return emit.more(),
            Some(b'{' | b'[') => Self::Json(Box::new(Calls::new(CLOSE, false))),
            Some(b'<') if after.starts_with(xml::CODER.open) => {
                let mut body = Xml::new(&xml::CODER);
                let step = body.opened(start + xml::CODER.open.len());
                *self = Self::Xml(Box::new(body));
                return step;
            }
            Some(b'<') if may_become(after, xml::CODER.open) => return emit.more(),
            Some(b'<') => return Step::Broken,
            Some(_) => Self::Xml(Box::new(Xml::new(&xml::GLM))),
        };
        Step::Took(start)
    }
}
