//! Calls as a name, a mark, and a JSON object: Mistral, DeepSeek, Kimi.

use super::json::Calls;
use super::{Arguments, Emit, Step, blank, closing, is_name, may_become};

/// How one family writes them.
#[derive(Debug)]
pub struct Form {
    /// What stands between name and object; the object's own brace does as well.
    pub marks: &'static [&'static str],
    /// What stands before the name where that is the tool's kind (`function`), with the name on the line after the mark.
    pub kind: Option<&'static str>,
    /// What is taken off the start of the name.
    pub prefix: &'static str,
    /// Whether the name ends in a colon and a number, which are no part of it.
    pub numbered: bool,
    /// What ends the call; it may be missing.
    pub close: &'static str,
}

/// Where a name that is longer than this would be, there is something else.
const LONGEST: usize = 256;
/// No mark is longer than this, in bytes.
const MARK: usize = 64;
/// What some models put around the object.
const FENCE: &str = "```";

#[derive(Debug)]
enum At {
    Name,
    /// After the mark, where the kind of the tool came first.
    Line,
    /// Before the object.
    Object,
    Arguments,
    Close,
    /// It is a list of objects instead.
    List(Box<Calls>),
}

#[derive(Debug)]
pub(crate) struct Named {
    form: &'static Form,
    at: At,
    name: String,
    arguments: Arguments,
    fenced: bool,
}

impl Named {
    pub(super) fn new(form: &'static Form) -> Self {
        Self { form, at: At::Name, name: String::new(), arguments: Arguments::new(), fenced: false }
    }

    pub(super) fn step(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        match &mut self.at {
            At::List(calls) => calls.step(rest, emit),
            At::Name => self.name(rest, emit),
            At::Line => match rest.split_once(['\n', '{']) {
                Some((name, _)) if name.len() > LONGEST => Step::Broken,
                None if rest.len() > LONGEST => Step::Broken,
                Some((name, _)) if is_name(name.trim()) && emit.allows(name.trim()) => {
                    name.trim().clone_into(&mut self.name);
                    self.at = At::Object;
                    Step::Took(name.len())
                }
                // The mark was that after the name, and the name is `function` itself.
                Some((name, _)) if name.trim().is_empty() && emit.allows(&self.name) => {
                    self.at = At::Object;
                    Step::Took(0)
                }
                Some(_) => Step::Broken,
                None => emit.more(),
            },
            At::Object => self.object(rest, emit),
            At::Arguments => match self.arguments.read(rest, Some(&self.name), emit) {
                None => Step::Broken,
                Some((read, true)) => {
                    emit.end(true);
                    self.at = At::Close;
                    Step::Took(read)
                }
                Some((0, false)) => emit.more(),
                Some((read, false)) => Step::Took(read),
            },
            At::Close => {
                let start = blank(rest);
                let after = rest.get(start..).unwrap_or_default();
                if self.fenced && after.starts_with(FENCE) {
                    self.fenced = false;
                    return Step::Took(start + FENCE.len());
                }
                if self.fenced && may_become(after, FENCE) {
                    return emit.cut(rest);
                }
                closing(rest, self.form.close, emit)
            }
        }
    }

    fn name(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        let start = blank(rest);
        match rest.as_bytes().get(start) {
            None => return emit.more(),
            Some(b'[')
                if !self
                    .form
                    .marks
                    .iter()
                    .any(|mark| mark.starts_with('[') && rest.get(start..).is_some_and(|rest| rest.starts_with(mark))) =>
            {
                // A mark that begins with a bracket cannot come first, so this is a list.
                self.at = At::List(Box::new(Calls::new("", false)));
                return Step::Took(start);
            }
            Some(_) => {}
        }
        let found = self.form.marks.iter().copied().chain(["{"]).filter_map(|mark| Some((rest.find(mark)?, mark))).min();
        let Some((end, mark)) = found else {
            return if rest.len() > LONGEST + MARK { Step::Broken } else { emit.more() };
        };
        if end > LONGEST {
            return Step::Broken;
        }
        let name = rest.get(..end).unwrap_or_default().trim();
        let name = name.strip_prefix(self.form.prefix).unwrap_or(name);
        let name = match name.rsplit_once(':') {
            Some((name, number)) if self.form.numbered && number.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => name,
        };
        let kind = mark != "{" && self.form.kind == Some(name);
        if !is_name(name) || !(kind || emit.allows(name)) {
            return Step::Broken;
        }
        name.clone_into(&mut self.name);
        self.at = if kind { At::Line } else { At::Object };
        Step::Took(if mark == "{" { end } else { end + mark.len() })
    }

    /// Goes on to the object, over blanks, a fence with its language, and what some models put after a second mark.
    fn object(&mut self, rest: &str, emit: &mut Emit<'_>) -> Step {
        let start = blank(rest);
        let after = rest.get(start..).unwrap_or_default();
        if after.starts_with('{') {
            self.at = At::Arguments;
            return Step::Took(start);
        }
        if let Some(mark) = self.form.marks.iter().find(|mark| after.starts_with(*mark)) {
            return Step::Took(start + mark.len());
        }
        if after.starts_with(FENCE) {
            self.fenced = true;
            return after.find('\n').map_or_else(|| emit.more(), |end| Step::Took(start + end));
        }
        // The number of a call stands between two marks.
        let between = self.form.marks.len() > 1;
        let head = after.split(['{', '\n']).next().unwrap_or_default();
        if between && let Some(end) = self.form.marks.iter().filter_map(|mark| head.find(mark)).min() {
            return if end > LONGEST { Step::Broken } else { Step::Took(start + end) };
        }
        let waits = may_become(after, FENCE) || (between && head.len() == after.len() && after.len() <= LONGEST + MARK);
        if waits { emit.more() } else { Step::Broken }
    }
}
