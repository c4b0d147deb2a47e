//! Rewrites a graph that the importer made, as it is opened: products, and what lies between two of them, become one node each, of emberd's own operators, and activations are rounded to bytes where that is asked for.
//!
//! The file stays as it is, and runs wherever ONNX Runtime does. The patterns are those that [`super::decoder`] writes; a part of a graph that looks otherwise is left alone. The operators
//! themselves are in `rust/kernels`.

use std::collections::{HashMap, HashSet};

use prost::Message;

use super::head::{POSITION_LOGITS, ROUGH, TOP_INDICES, TOP_SIZE, TOP_VALUES};
use super::packed::{LEVEL_FLOAT, LEVEL_INT8};
use super::proto::{AttributeProto, Dimension, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, attribute_type};

/// The domain of the operators and its version.
const DOMAIN: (&str, i64) = ("emberd", 1);

/// What a graph is rewritten to.
pub struct Wanted {
    /// The sizes of a head that emberd's operator of attention computes; `None` where what lies between two products is left to the runtime.
    pub heads: Option<fn(usize) -> bool>,
    /// The matrices that the operator of products computes, by bits of a code, columns that share a scale, and rows; `None` where the runtime's own products are wanted.
    pub products: Option<fn(usize, usize, usize) -> bool>,
    /// Whether activations are rounded to bytes where they meet weights of 4 bits.
    pub int8: bool,
}

impl std::fmt::Debug for Wanted {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Wanted")
            .field("heads", &self.heads.is_some())
            .field("products", &self.products.is_some())
            .field("int8", &self.int8)
            .finish()
    }
}

/// The graph as it is wanted, or `None` where that is how it is, or where it is not one that the importer writes.
#[must_use]
pub fn rewritten(model: &[u8], wanted: &Wanted) -> Option<Vec<u8>> {
    let mut read = ModelProto::decode(model).ok()?;
    // What the messages here do not know would be lost: such a graph has another author.
    if read.encoded_len() != model.len() {
        return None;
    }
    let graph = read.graph.as_mut()?;
    let rounded = wanted.int8 && round(graph);
    let multiplied = wanted.products.is_some_and(|known| multiply(graph, known));
    let fused = wanted.heads.is_some_and(|heads| fuse(graph, heads));
    if fused || multiplied {
        sweep(graph);
        read.opset_import.push(OperatorSetIdProto { domain: Some(DOMAIN.0.to_owned()), version: Some(DOMAIN.1) });
    }
    (rounded || fused || multiplied).then(|| read.encode_to_vec())
}

/// Sets the level of all products whose activations are floats; says whether there was one.
fn round(graph: &mut GraphProto) -> bool {
    let mut any = false;
    for node in graph.node.iter_mut().filter(|node| node.is("MatMulNBits")) {
        for attribute in node.attribute.iter_mut().filter(|attribute| attribute.name.as_deref() == Some("accuracy_level")) {
            if attribute.i == Some(LEVEL_FLOAT) {
                attribute.i = Some(LEVEL_INT8);
                any = true;
            }
        }
    }
    any
}

/// Puts emberd's operator in the place of products whose matrices it computes; says whether there was one.
fn multiply(graph: &mut GraphProto, known: fn(usize, usize, usize) -> bool) -> bool {
    let shaped: HashMap<String, String> = graph
        .node
        .iter()
        .filter(|node| node.is("Reshape"))
        .filter_map(|node| Some((node.output.first()?.clone(), node.input.first()?.clone())))
        .collect();
    let constants: HashSet<String> = graph.initializer.iter().filter_map(|tensor| tensor.name.clone()).collect();
    let mut any = false;
    for node in graph.node.iter_mut().filter(|node| node.is("MatMulNBits")) {
        let size = |name| usize::try_from(node.integer(name)?).ok();
        let (Some(bits), Some(block), Some(rows)) = (size("bits"), size("block_size"), size("N")) else {
            continue;
        };
        // The operator reads codes in whatever shape: one that the graph gives them would only be a copy.
        let codes = node.input.get(1).map(|codes| shaped.get(codes).unwrap_or(codes).clone());
        let plain = node.input.len() <= 4 && node.input.iter().skip(2).all(|input| constants.contains(input));
        let Some(codes) = codes.filter(|codes| plain && constants.contains(codes) && known(bits, block, rows)) else {
            continue;
        };
        node.input[1] = codes;
        node.op_type = Some("Product".to_owned());
        node.domain = Some(DOMAIN.0.to_owned());
        node.attribute.retain(|attribute| matches!(attribute.name.as_deref(), Some("bits" | "K" | "N")));
        any = true;
    }
    if any {
        exact_head(graph);
    }
    any
}

/// A head whose best logits are computed twice, first from rounded hidden states and then in floats, needs the first of it alone where that is exact: it takes over the names of what is found in
/// the end, and nobody takes the rest any more.
fn exact_head(graph: &mut GraphProto) {
    let Some(at) = graph.node.iter().position(|node| node.is("Product") && node.output == [ROUGH]) else {
        return;
    };
    let mut product = graph.node.remove(at);
    product.output = vec![POSITION_LOGITS.to_owned()];
    let best = NodeProto {
        name: Some(format!("TopK/{TOP_VALUES}")),
        input: vec![POSITION_LOGITS.to_owned(), TOP_SIZE.to_owned()],
        output: vec![TOP_VALUES.to_owned(), TOP_INDICES.to_owned()],
        op_type: Some("TopK".to_owned()),
        domain: Some(String::new()),
        ..NodeProto::default()
    };
    let found = [POSITION_LOGITS, TOP_VALUES, TOP_INDICES];
    // One of them comes from a node that gives something else as well, which only the rest takes.
    graph.node.retain(|node| !node.output.iter().any(|output| found.contains(&output.as_str())));
    graph.node.splice(at..at, [product, best]);
}

/// Puts one node in the place of several; says whether it found any.
fn fuse(graph: &mut GraphProto, heads: fn(usize) -> bool) -> bool {
    let mut patterns = Patterns::of(graph);
    for at in 0..graph.node.len() {
        let node = &graph.node[at];
        let made = match node.op_type.as_deref() {
            Some("GroupQueryAttention") => patterns.attention(graph, node, heads),
            Some("SkipSimplifiedLayerNormalization" | "SimplifiedLayerNormalization") => patterns.norm(graph, node),
            Some("Mul") => patterns.gated(graph, node),
            _ => None,
        };
        if let Some(made) = made {
            patterns.made.insert(at, made);
        }
    }
    if patterns.made.is_empty() {
        return false;
    }
    let Patterns { mut made, gone, .. } = patterns;
    let nodes = std::mem::take(&mut graph.node).into_iter().enumerate();
    graph.node = nodes.filter_map(|(at, node)| made.remove(&at).or_else(|| (!gone.contains(&at)).then_some(node))).collect();
    true
}

/// Drops nodes of which nobody takes anything any more, and constants.
fn sweep(graph: &mut GraphProto) {
    let outputs: HashSet<String> = graph.output.iter().filter_map(|output| output.name.clone()).collect();
    loop {
        let used: HashSet<String> = graph.node.iter().flat_map(|node| node.input.iter().cloned()).collect();
        let before = graph.node.len();
        graph.node.retain(|node| node.output.iter().any(|output| used.contains(output) || outputs.contains(output)));
        if graph.node.len() == before {
            graph.initializer.retain(|tensor| tensor.name.as_ref().is_some_and(|name| used.contains(name)));
            return;
        }
    }
}

/// What is known of a graph whose nodes are looked at one after the other.
struct Patterns {
    /// The node that makes a value.
    maker: HashMap<String, usize>,
    /// The nodes that take a value.
    takers: HashMap<String, Vec<usize>>,
    /// What the graph gives.
    outputs: HashSet<String>,
    /// What comes in the place of a node.
    made: HashMap<usize, NodeProto>,
    /// Nodes whose work is done by others.
    gone: HashSet<usize>,
}

/// Block sums that are part of a node: their form, and the name of the row that they stand behind.
struct Extended {
    row: String,
    block: i64,
    digits: i64,
}

impl Patterns {
    fn of(graph: &GraphProto) -> Self {
        let mut takers: HashMap<String, Vec<usize>> = HashMap::new();
        let mut maker = HashMap::new();
        for (at, node) in graph.node.iter().enumerate() {
            for input in &node.input {
                takers.entry(input.clone()).or_default().push(at);
            }
            maker.extend(node.output.iter().map(|output| (output.clone(), at)));
        }
        let outputs = graph.output.iter().filter_map(|output| output.name.clone()).collect();
        Self { maker, takers, outputs, made: HashMap::new(), gone: HashSet::new() }
    }

    /// The node that alone takes `value`.
    fn only_taker<'a>(&self, graph: &'a GraphProto, value: &str) -> Option<(usize, &'a NodeProto)> {
        match self.takers.get(value).map(Vec::as_slice) {
            Some(&[at]) if !self.outputs.contains(value) => Some((at, graph.node.get(at)?)),
            _ => None,
        }
    }

    /// The block sums of `value`, whose nodes are gone then; where there are none, or somebody takes the value without them, the value itself.
    fn extended(&mut self, graph: &GraphProto, value: &str) -> Extended {
        let plain = Extended { row: value.to_owned(), block: 0, digits: 0 };
        let prefix = format!("{value}/extended/");
        let inside = |at: &usize| graph.node.get(*at).is_some_and(|node| node.output.iter().all(|output| output.starts_with(&prefix)));
        let takers = self.takers.get(value).map_or(&[][..], Vec::as_slice);
        if takers.is_empty() || self.outputs.contains(value) || !takers.iter().all(inside) {
            return plain;
        }
        // The row is what no node of the sums takes.
        let nodes: Vec<usize> = (0..graph.node.len()).filter(inside).collect();
        let mut rows = nodes.iter().filter_map(|at| graph.node[*at].output.first()).filter_map(|output| {
            let mut form = output.strip_prefix(&prefix)?.split('/');
            match (form.next()?.parse(), form.next()?.parse(), form.next()) {
                (Ok(block), Ok(digits), None) => Some(Extended { row: output.clone(), block, digits }),
                _ => None,
            }
        });
        let (Some(row), None) = (rows.next(), rows.next()) else {
            return plain;
        };
        self.gone.extend(nodes);
        row
    }

    /// `Reshape`, `GroupQueryAttention`, `Reshape`, and the block sums.
    fn attention(&mut self, graph: &GraphProto, node: &NodeProto, heads: fn(usize) -> bool) -> Option<NodeProto> {
        let [rows, keys, values, past_key, past_value, last, _, cos, sin] = node.input.as_slice() else {
            return None;
        };
        let [context, present_key, present_value] = node.output.as_slice() else {
            return None;
        };
        let dim = fixed_size(graph, past_key, 3)?;
        let known = ["num_heads", "kv_num_heads", "scale", "do_rotary", "rotary_interleaved", "local_window_size"];
        let unknown = |attribute: &AttributeProto| !attribute.name.as_deref().is_some_and(|name| known.contains(&name));
        if !keys.is_empty()
            || !values.is_empty()
            || node.integer("do_rotary") != Some(1)
            || node.integer("rotary_interleaved") != Some(0)
            || node.attribute.iter().any(unknown)
            || !heads(dim)
        {
            return None;
        }
        let before = *self.maker.get(rows)?;
        let (after, flat) = self.only_taker(graph, context)?;
        let unshaped = graph.node.get(before).filter(|node| node.is("Reshape"))?;
        if !flat.is("Reshape") || self.only_taker(graph, rows).is_none() {
            return None;
        }
        let attributes = vec![
            integer("heads", node.integer("num_heads")?),
            integer("kv_heads", node.integer("kv_num_heads")?),
            integer("window", node.integer("local_window_size").filter(|&window| window > 0).unwrap_or(0)),
            AttributeProto { name: Some("scale".to_owned()), f: Some(node.float("scale")?), i: None, r#type: Some(attribute_type::FLOAT) },
        ];
        let (inputs, flat) = ([unshaped.input.first()?, past_key, past_value, last, cos, sin], flat.output.first()?);
        // Nothing may be missing from here on: what is gone has to be replaced.
        self.gone.extend([before, after]);
        let row = self.extended(graph, flat);
        Some(row.node("Attention", &inputs.map(String::as_str), &[present_key, present_value], attributes))
    }

    /// `SkipSimplifiedLayerNormalization` or `SimplifiedLayerNormalization`, and the block sums.
    fn norm(&mut self, graph: &GraphProto, node: &NodeProto) -> Option<NodeProto> {
        let epsilon = AttributeProto {
            name: Some("epsilon".to_owned()),
            f: Some(node.float("epsilon")?),
            i: None,
            r#type: Some(attribute_type::FLOAT),
        };
        let out = node.output.first()?;
        match (node.input.as_slice(), node.output.get(1..)?) {
            ([x, weight], []) => Some(self.extended(graph, out).node("AddNorm", &[x, weight], &[], vec![epsilon])),
            ([residual, added, weight], [mean, variance, sum]) if mean.is_empty() && variance.is_empty() => {
                let row = self.extended(graph, out);
                Some(row.node("AddNorm", &[residual, weight, added], &[sum], vec![epsilon]))
            }
            _ => None,
        }
    }

    /// `Split`, `QuickGelu`, `Mul`, and the block sums.
    fn gated(&mut self, graph: &GraphProto, node: &NodeProto) -> Option<NodeProto> {
        let [active, up] = node.input.as_slice() else {
            return None;
        };
        let activate = *self.maker.get(active)?;
        let activation = graph.node.get(activate).filter(|node| node.is("QuickGelu") && node.float("alpha") == Some(1.0))?;
        let gate = activation.input.first()?;
        let split = *self.maker.get(gate)?;
        let halves = graph.node.get(split).filter(|node| node.is("Split"))?;
        let alone = [active, gate, up].iter().all(|value| self.only_taker(graph, value).is_some());
        if !alone || halves.output.as_slice() != [gate.clone(), up.clone()] {
            return None;
        }
        let (both, out) = (halves.input.first()?, node.output.first()?);
        self.gone.extend([activate, split]);
        Some(self.extended(graph, out).node("Gated", &[both], &[], Vec::new()))
    }
}

impl Extended {
    /// A node that gives this row, then `others`.
    fn node(self, operator: &str, inputs: &[&str], others: &[&String], mut attributes: Vec<AttributeProto>) -> NodeProto {
        attributes.extend([integer("block", self.block), integer("digits", self.digits)]);
        NodeProto {
            name: Some(format!("{operator}/{}", self.row)),
            input: inputs.iter().map(|&input| input.to_owned()).collect(),
            output: std::iter::once(self.row).chain(others.iter().map(|&other| other.clone())).collect(),
            op_type: Some(operator.to_owned()),
            attribute: attributes,
            domain: Some(DOMAIN.0.to_owned()),
        }
    }
}

impl NodeProto {
    fn is(&self, operator: &str) -> bool {
        self.op_type.as_deref() == Some(operator)
    }

    fn named(&self, name: &str) -> Option<&AttributeProto> {
        self.attribute.iter().find(|attribute| attribute.name.as_deref() == Some(name))
    }

    fn integer(&self, name: &str) -> Option<i64> {
        self.named(name)?.i
    }

    fn float(&self, name: &str) -> Option<f32> {
        self.named(name)?.f
    }
}

fn integer(name: &str, value: i64) -> AttributeProto {
    AttributeProto { name: Some(name.to_owned()), f: None, i: Some(value), r#type: Some(attribute_type::INT) }
}

/// A size of an input that the graph gives as a number.
fn fixed_size(graph: &GraphProto, input: &str, axis: usize) -> Option<usize> {
    let input = graph.input.iter().find(|each| each.name.as_deref() == Some(input))?;
    let shape = input.r#type.as_ref()?.tensor_type.as_ref()?.shape.as_ref()?;
    match shape.dim.get(axis)?.value {
        Some(Dimension::Size(size)) => usize::try_from(size).ok(),
        _ => None,
    }
}
